"""The parts of `verify`. They share nothing with the engine above the file format, so they inherit no fault of it."""
