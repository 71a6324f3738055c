"""A run over many machines: Ray places long-lived workers, and each trains its share of every cohort by a simulator."""
