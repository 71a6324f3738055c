"""Data sets: drawn from a seed, of LEAF and of papers, and of other libraries and folders."""

from __future__ import annotations

from equipoise.data.datasets.bridges import from_folders, from_hugging_face, from_partitions
from equipoise.data.datasets.data_files import FOLDER_VARIABLE, data_file, load_arrays, load_json, npz
from equipoise.data.datasets.generators import digits, gaussian_means, label_shift, synthetic
from equipoise.data.datasets.idx_files import mnist_images
from equipoise.data.datasets.leaf import leaf
from equipoise.data.datasets.loaders import adult, fashion_mnist, femnist, imdb, mocha, omniglot, shakespeare, texts, vehicle
from equipoise.data.datasets.text import PADDING, UNKNOWN, Features, WordVectors, from_texts, glove

__all__ = [
    "FOLDER_VARIABLE",
    "PADDING",
    "UNKNOWN",
    "Features",
    "WordVectors",
    "adult",
    "data_file",
    "digits",
    "fashion_mnist",
    "femnist",
    "from_folders",
    "from_hugging_face",
    "from_partitions",
    "from_texts",
    "gaussian_means",
    "glove",
    "imdb",
    "label_shift",
    "leaf",
    "load_arrays",
    "load_json",
    "mnist_images",
    "mocha",
    "npz",
    "omniglot",
    "shakespeare",
    "synthetic",
    "texts",
    "vehicle",
]  # fmt: skip
