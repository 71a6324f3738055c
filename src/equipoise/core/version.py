"""The version of this library."""

VERSION = "0.2.0.dev0"
