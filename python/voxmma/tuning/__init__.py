"""What is measured on a device: times of tiles, and the validation of fp16-accumulator tiles."""
