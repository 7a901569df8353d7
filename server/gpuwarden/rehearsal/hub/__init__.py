"""An emulated Hugging Face Hub with repositories, buckets, jobs and a dataset viewer."""
