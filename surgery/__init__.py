"""surgery: edit language-model checkpoints that do not fit in memory, streaming from disk to disk."""

__version__ = "0.1.0"
