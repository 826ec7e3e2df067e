"""The continuous-batching engine: the step, the thread that takes it, and the streams of those who asked."""
