"""Privacy: what clients may keep to themselves, and what each release about them costs."""

from equipoise.privacy.accounting import epsilon_of, noise_for
from equipoise.privacy.correlated_noise import BLT, Banded, fit_blt
from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.dp_ftrl import DPFTRL
from equipoise.privacy.mechanism import AdaptiveClip, DifferentialPrivacy, GaussianMechanism, SecureAggregation
from equipoise.privacy.private_quantile import PrivateQuantile
from equipoise.privacy.random_source import Seeded, SystemSource
from equipoise.privacy.secure_histogram import SecureHistogram
from equipoise.risk.quantile_sources import Exact, SecureSums

__all__ = [
    "BLT",
    "DPFTRL",
    "AdaptiveClip",
    "Banded",
    "DifferentialPrivacy",
    "Exact",
    "GaussianMechanism",
    "PrivateQuantile",
    "SecureAggregation",
    "SecureHistogram",
    "SecureSums",
    "Seeded",
    "SystemSource",
    "epsilon_of",
    "fit_blt",
    "noise_for",
    "sample_discrete_gaussian",
]
