"""What the caches of transformers really hold, beside what the sizing says."""
