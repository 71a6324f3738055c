"""A federation: Equipoise on Flower."""
