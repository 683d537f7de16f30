"""What to change in the config of a training step that does not fit on a device."""

ADVICE = {
    "saved residual": "--set pipeline.remat=full, or --set pipeline.schedule=1f1b, which keeps "
    "fewer microbatches",
    "activation": "more microbatches of fewer sequences: --set pipeline.num_microbatches=N",
    "logits": "--set train.loss_chunks=N: the loss of a part of the sequence at a time",
    "gathered weight": "--set pipeline.fsdp_gather=use: weights of one layer at a time",
    "gradient accumulator": "a mesh with more fsdp, --set train.shard_optimizer_over_data=true on "
    "one with data, or --set pipeline.unrolled_layers=1, which is slower",
    "arguments": "a mesh with more devices along stage or fsdp",
}
