"""Train any model of Hugging Face transformers, built from its config alone.

    sources     find a config.json: a path, a folder, or an id in the local Hugging Face cache
    tasks       choose the training objective, and inputs for it
    structure   the stacks of repeated layers, which can be shortened
    recipes     how to train, in the usual packages: transformers, peft, bitsandbytes and torch
    training    build (step, model, optimizer)
    measuring   predict the bytes and the time of a step from shallow models

Nothing here reads weights: they are random, or fake tensors.
"""
