"""Plans a training run: lists layouts of a model on chips, predicts each, and compiles the best."""
