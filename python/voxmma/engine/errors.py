"""What an engine raises."""


class EngineError(RuntimeError):
    """A network that an engine cannot take, a frame that does not fit, or a file that is not an engine."""
