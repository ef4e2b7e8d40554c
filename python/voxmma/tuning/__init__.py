"""What is measured on a device: times of tiles, and the gate for fp16 accumulators."""
