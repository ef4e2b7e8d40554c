"""The parts of `examples/segment.py`, one concern a file: formats, data, run, checkpoint, evaluation."""
