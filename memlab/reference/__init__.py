"""Reference implementations: one technique per file, at most 60 lines of code, only torch.

Each file follows its paper step by step. The lessons' solutions are taken from these files. Tests
compare the library's versions with them, in values and bytes.

    technique                           library version
    adamw                               memlab.optim.AdamW
    lion                                memlab.optim.Lion
    adam_mini                           memlab.optim.AdamMini
    adam8bit                            memlab.optim.Adam8bit
    muon                                memlab.optim.Muon
    galore                              memlab.optim.GaLore
    apollo                              memlab.optim.Apollo
    soap (Shampoo and SOAP)             none: their state is larger than AdamW's
    step_in_backward                    memlab.optim.step_in_backward
    loss_scaling                        memlab.precision.LossScaler
    checkpointing                       memlab.checkpointing.checkpoint
    selective_checkpointing             memlab.checkpointing.selective
    activation_compression              memlab.compression.compressed_activations
    tiled_attention                     memlab.attention.flash_attention
    chunked_loss                        memlab.losses.chunked_cross_entropy
    log_probs                           memlab.losses.token_log_probs
    packing                             none: a sort, once before training
    collectives, sharded_optimizer,     memlab.zero.simulate
    sharded_weights
    tensor_parallel                     none: torch.distributed.tensor.parallel
    pipeline                            none: torch.distributed.pipelining
    ring_attention                      none: torch's context_parallel, on GPUs
    offloaded_optimizer                 memlab.offload.OffloadedOptimizer
    post_hoc_ema                        memlab.ema
    nf4                                 memlab.quantize (NF4)
    qlora                               memlab.qlora
    fp8                                 memlab.precision.convert_to_fp8
    meter                               memlab.measure
    caching_allocator                   memlab.allocator.simulate
"""
