"""The drivers of `benchmarks/campaign.py`: each tries random cases until its time is over, and keeps what it finds."""
