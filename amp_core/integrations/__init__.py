"""amp-core inside the trainers that people use; each module needs its package, and is imported by itself."""
