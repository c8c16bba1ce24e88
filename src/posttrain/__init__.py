"""posttrain: a whole LLM post-training study as one Snakemake DAG."""

__version__ = "0.1.0"
