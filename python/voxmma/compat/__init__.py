"""What comes from other libraries."""
