"""What to do about each cause: sentences, what they save, and the code for each framework.

    do      the sentence
    saves   what it saves, if that can be said without a snapshot
    code    by framework: Python, or shell lines that begin with "$ "
    unless  names of advice.DONE: what a log may show that makes it useless

The first fix that a log does not rule out is printed with its code. tests/explain/test_fixes.py
compiles every code and runs what this machine can run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

FRAMEWORKS = (
    *("torch", "trainer", "lightning", "deepspeed", "accelerate", "diffusers", "vllm"),
    *("tensorflow", "jax", "ray"),
)


@dataclass(frozen=True)
class Fix:
    """One thing to do about a cause."""

    do: str
    saves: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    unless: tuple[str, ...] = ()


LENGTH = "8192"  # of a context, in code; replaced by the one that a log says to fit
_EXPANDABLE = "$ export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_HALVE = Fix(
    "Halve the batch, and accumulate gradients over two batches.",
    "about half of the activations",
    {
        "torch": "(loss / 2).backward()\nif step % 2 == 1:\n    optimizer.step()\n"
        "    optimizer.zero_grad()",
        "trainer": "TrainingArguments(\n    per_device_train_batch_size=batch_size // 2,\n"
        "    gradient_accumulation_steps=2,\n)",
        "lightning": "Trainer(accumulate_grad_batches=2)",
        "deepspeed": '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}',
        "accelerate": "Accelerator(gradient_accumulation_steps=2)",
    },
    unless=("batch of 1", "inference"),
)
_CHECKPOINT = Fix(
    "Use activation checkpointing: torch.utils.checkpoint.checkpoint around each layer, or "
    "model.gradient_checkpointing_enable().",
    "most activations of all layers but one, for about a third more time",
    {
        "torch": "from torch.utils.checkpoint import checkpoint\n\n"
        "x = checkpoint(layer, x, use_reentrant=False)",
        "trainer": "TrainingArguments(gradient_checkpointing=True)",
        "accelerate": "model.gradient_checkpointing_enable()",
        "deepspeed": "model.gradient_checkpointing_enable()",
        "diffusers": "unet.enable_gradient_checkpointing()",
    },
    unless=("checkpointing", "inference"),
)
_SMALLER_INPUT = Fix(
    "Run fewer inputs at once, or smaller ones (resolution, tokens).",
    "activations shrink in proportion",
    {"diffusers": "pipe(prompt, height=512, width=512, num_images_per_prompt=1)"},
    unless=("training",),
)
_WATERMARK = "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
_ON_MPS = (
    Fix("Close other applications: they share this memory.", unless=("not MPS",)),
    Fix(
        f"{_WATERMARK} removes the limit, but the system may then swap or stop.",
        code={"torch": f"$ export {_WATERMARK}"},
        unless=("not MPS",),
    ),
)
_SMALLER_GPU_SHARE = Fix(
    "Give the engine a smaller share of the card.",
    "each 0.1 frees a tenth of the card",
    {
        "torch": "LLM(model, gpu_memory_utilization=0.5)",
        "trainer": "GRPOConfig(vllm_gpu_memory_utilization=0.3, vllm_enable_sleep_mode=True)",
        "vllm": "$ vllm serve MODEL --gpu-memory-utilization 0.5",
    },
)
_CPU_LOAD = Fix(
    'Load checkpoints on the CPU: torch.load(path, map_location="cpu"); load_state_dict copies them.',
    "one copy of the weights and of AdamW's state",
    {
        "torch": 'checkpoint = torch.load(path, map_location="cpu")\n'
        'model.load_state_dict(checkpoint["model"])\n'
        'optimizer.load_state_dict(checkpoint["optimizer"])\ndel checkpoint',
    },
)

FIXES: dict[str, tuple[str, tuple[Fix, ...]]] = {
    "batch": (
        "the batch is too large",
        (
            _HALVE,
            _CHECKPOINT,
            _SMALLER_INPUT,
            Fix(
                "Use autocast in bfloat16, or in float16 before Ampere (T4, V100): most activations "
                "shrink to half.",
                "up to half of the activations",
                {
                    "torch": 'with torch.autocast("cuda", dtype=torch.bfloat16):\n'
                    "    loss = model(x)",
                    "trainer": "TrainingArguments(bf16=True)",
                    "lightning": 'Trainer(precision="bf16-mixed")',
                    "deepspeed": '{"bf16": {"enabled": True}}',
                    "accelerate": 'Accelerator(mixed_precision="bf16")',
                },
                unless=("16 bits", "inference"),
            ),
            Fix(
                "With diffusers: pipe.vae.enable_tiling(), pipe.enable_model_cpu_offload().",
                "all parts of the pipeline but the one that runs",
                {"diffusers": "pipe.enable_model_cpu_offload()"},
                unless=("no diffusers",),
            ),
            Fix(
                "Shorten the inputs, offload activations, or shard the model (FSDP, ZeRO-3).",
                "",
                {"torch": "with torch.autograd.graph.save_on_cpu():\n    loss = model(x)"},
                unless=("other fixes",),
            ),
            *_ON_MPS,
        ),
    ),
    "sequence": (
        "the sequence is too long: attention scores grow with its square",
        (
            Fix(
                "Call F.scaled_dot_product_attention, which never stores the scores.",
                "heads × tokens² × bytes, in each layer",
                {
                    "torch": "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                    "trainer": "AutoModelForCausalLM.from_pretrained(\n"
                    '    name, attn_implementation="sdpa"\n)',
                    "diffusers": "pipe.unet.set_attn_processor(AttnProcessor2_0())",
                },
            ),
            Fix(
                "Shorten or pack the sequences; half the length needs a quarter of the scores.",
                "three quarters of the scores",
                {
                    "torch": "ids = ids[:, :2048]",
                    "trainer": "tokenizer(texts, truncation=True, max_length=2048)",
                },
            ),
            Fix("Filter the longest samples, or batch by tokens: one outlier sets the peak."),
        ),
    ),
    "logits": (
        "the logits in float32: tokens × vocabulary",
        (
            Fix(
                "Compute the loss in chunks, so the full logits never exist "
                "(memlab.losses.chunked_cross_entropy, or Liger's fused linear cross-entropy).",
                "almost all of tokens × vocabulary × 4 bytes, and as much for their gradient",
                {
                    "torch": "from memlab.losses import chunked_cross_entropy\n\n"
                    "loss = chunked_cross_entropy(hidden, lm_head.weight, labels, chunk=1024)",
                    "trainer": "TrainingArguments(use_liger_kernel=True)",
                },
            ),
            Fix(
                "If the code casts the logits to float32, keep them in 16 bits: drop the cast before "
                "the loss.",
                "half of the logits",
                {},
                unless=("no cast",),
            ),
            Fix(
                "Shorten the sequences or halve the batch: preference losses (DPO, GRPO) run two or "
                "more sequences per sample.",
                "in proportion to tokens",
                unless=("evaluation",),
            ),
        ),
    ),
    "no-checkpointing": (
        "no checkpointing: every layer keeps its activations for backward",
        (_CHECKPOINT, _HALVE),
    ),
    "optimizer-state": (
        "the optimizer state, which the first step creates",
        (
            Fix(
                "Use an 8-bit optimizer (2 bytes a weight instead of AdamW's 8), or Lion.",
                "6 bytes for each trained weight",
                {
                    "torch": "import bitsandbytes as bnb\n\n"
                    "optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-4)",
                    "trainer": 'TrainingArguments(optim="adamw_bnb_8bit")',
                    "deepspeed": '{"zero_optimization": {\n    "stage": 2,\n    "offload_optimizer": {"device": "cpu"},\n}}',
                },
                unless=("MPS",),  # for which bitsandbytes has no such optimizer
            ),
            Fix(
                "Train fewer weights (LoRA), or shard or offload the state (ZeRO, FSDP).",
                "state and gradients of all weights that are frozen",
                {"trainer": 'model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))'},
            ),
        ),
    ),
    "no-grad": (
        "evaluation without no_grad: it keeps activations for a backward that never comes",
        (
            Fix(
                "Wrap the evaluation in torch.no_grad() or torch.inference_mode(); model.eval() alone "
                "keeps the activations.",
                "all activations of the evaluation but one layer's",
                {"torch": "model.eval()\nwith torch.inference_mode():\n    output = model(x)"},
            ),
        ),
    ),
    "kept-graphs": (
        "losses kept with graphs: tensors of earlier steps stay alive",
        (
            Fix(
                "Append loss.item() or loss.detach(), not the loss, to lists and sums.",
                "all activations of earlier steps",
                {"torch": "total_loss += loss.item()\nlosses.append(loss.detach())"},
            ),
            Fix(
                "Delete outputs that the next step does not need.",
                code={"torch": "del output, loss"},
            ),
            Fix(
                "If memory does not grow from step to step, one batch was longer: put the longest "
                "first, and truncate it.",
            ),
        ),
    ),
    "kv-cache": (
        "cached generations: a KV cache that grows with every token",
        (
            Fix(
                "Generate fewer tokens or sequences at once, and delete the cache after each call.",
                "in proportion to sequences × tokens",
                {
                    "torch": "model.generate(ids, max_new_tokens=256, num_beams=1)",
                    "vllm": "$ vllm serve MODEL --max-model-len 8192 --max-num-seqs 64",
                },
            ),
            Fix(
                "Use a cache of fixed size, a sliding window, or a quantized cache.",
                "",
                {"torch": 'model.generate(ids, cache_implementation="offloaded")'},
            ),
        ),
    ),
    "fragmentation": (
        "fragmentation: enough memory is free, but not in one piece",
        (
            Fix(
                "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts.",
                "what is reserved but unallocated",
                {"torch": _EXPANDABLE},
            ),
            Fix(
                "Pad to a few fixed lengths, so that freed blocks fit again.",
                code={
                    "torch": "length = -(-length // 64) * 64",
                    "trainer": "DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64)",
                },
            ),
            Fix("Run the largest batch first: later ones then fit into its blocks."),
        ),
    ),
    "other-process": (
        "another process on the card",
        (
            Fix(
                "Run nvidia-smi and end the other process, or choose another card with "
                "CUDA_VISIBLE_DEVICES.",
                "what it holds",
                {"torch": "$ nvidia-smi\n$ CUDA_VISIBLE_DEVICES=1 python train.py"},
                unless=("worker",),
            ),
            Fix(
                "Return CPU tensors from the dataset, and move the batch to the GPU in the training "
                "loop: each worker that uses CUDA needs a context of its own.",
                unless=("no worker",),
            ),
            Fix(
                "If the workers must use CUDA, set num_workers=0 or make the batch of the training "
                "smaller.",
                unless=("no worker",),
            ),
        ),
    ),
    "weights": (
        "the weights alone fill the memory",
        (
            Fix(
                "Load the model in 16 or 4 bits (torch_dtype, BitsAndBytesConfig).",
                "half of float32's bytes in 16 bits, seven eighths in 4 bits",
                {
                    "torch": "model = model.to(dtype=torch.bfloat16)",
                    "trainer": "AutoModelForCausalLM.from_pretrained(\n    name,\n"
                    "    quantization_config=BitsAndBytesConfig(load_in_4bit=True),\n)",
                    "diffusers": "pipe = DiffusionPipeline.from_pretrained(name, "
                    "torch_dtype=torch.float16)\npipe.enable_model_cpu_offload()",
                    "vllm": "$ vllm serve MODEL --tensor-parallel-size 2",
                },
                unless=("MPS", "too large in 4 bits"),
            ),
            Fix(
                "Use a smaller model or one in 16 bits, and close other applications: they share this "
                f"memory. {_WATERMARK} removes the limit, but the system may then swap or stop.",
                "half of float32's bytes in 16 bits",
                {
                    "torch": f"model = model.to(dtype=torch.bfloat16)\n# or: export {_WATERMARK}",
                },
                unless=("not MPS",),
            ),
            Fix(
                'Split it: device_map="auto" offloads layers to the CPU; FSDP or ZeRO-3 shards them '
                "over GPUs.",
                "all layers that are elsewhere",
                {
                    "trainer": 'AutoModelForCausalLM.from_pretrained(name, device_map="auto")',
                    "deepspeed": '{"zero_optimization": {"stage": 3}}',
                    "accelerate": "$ accelerate launch --use_fsdp --num_processes 8 train.py",
                    "vllm": "$ vllm serve MODEL --tensor-parallel-size 8",
                },
                unless=("MPS",),
            ),
            Fix(
                "If a first model is still on the card, delete it before the second is loaded.",
                "one model",
                {
                    "torch": "import gc\n\ndel model, trainer\ngc.collect()\ntorch.cuda.empty_cache()"
                },
            ),
            Fix("Choose a smaller model, or a card with more memory."),
        ),
    ),
    "request": (
        "one request is larger than the card",
        (
            Fix(
                "Print the shapes at this line: a missing dimension broadcasts to B × B or T × T.",
                code={"torch": "print(a.shape, b.shape, a.dtype)"},
            ),
            Fix(
                "If the shapes are right, split the work: a lower resolution, shorter sequences, fused "
                "attention instead of T² scores, or the batch in parts.",
                code={"torch": "parts = [model(part) for part in x.split(8)]"},
            ),
        ),
    ),
    "limit": (
        "a limit of this process's memory, below what the card has free",
        (
            Fix(
                "Raise or remove torch.cuda.set_per_process_memory_fraction "
                "(per_process_memory_fraction in the allocator's settings).",
                "what the limit forbids",
                {"torch": "torch.cuda.set_per_process_memory_fraction(1.0)"},
            ),
        ),
    ),
    "predictions": (
        "predictions collected on the GPU: each evaluation batch adds its outputs",
        (
            Fix(
                "Move each batch's outputs to the CPU before you collect them: output.cpu().",
                "the outputs of all batches but one",
                {
                    "torch": "outputs.append(output.cpu())",
                    "trainer": "TrainingArguments(eval_accumulation_steps=10)",
                },
            ),
            Fix(
                "With transformers' Trainer, set eval_accumulation_steps, or reduce the outputs in "
                "preprocess_logits_for_metrics.",
                code={
                    "trainer": "def best(logits, labels):\n    return logits.argmax(-1)\n\n\nTrainer(preprocess_logits_for_metrics=best)",
                },
            ),
        ),
    ),
    "host-ram": (
        "the computer's own memory (RAM) ran out, not the GPU's",
        (
            Fix(
                "Add memory or swap, or start fewer processes: each of them holds its own copy.",
                code={"torch": "$ free -g"},
                unless=("no kernel line",),
            ),
            Fix(
                "Keep no outputs: this line joins those of all batches. Update the metric after each "
                "batch instead.",
                "the outputs of all batches but one",
                unless=("no joined outputs",),
            ),
            Fix(
                "Make the buffer that this line makes smaller, or keep its arrays in a file "
                "(numpy.memmap).",
                "half of it with half of its length",
                unless=("no buffer",),
            ),
            Fix(
                "Let Ray start fewer tasks at once: state the memory that each of them needs.",
                "the tasks that then wait for memory",
                {"ray": "task.options(memory=16 * 2**30, num_cpus=4).remote(data)"},
                unless=("no ray",),
            ),
            Fix(
                "Offload less to RAM: AdamW's state there needs 12 bytes for each weight of the model, "
                "and each rank may load a whole copy of the weights first.",
                "12 bytes for each weight, if NVMe holds the state",
                {
                    "deepspeed": '{"zero_optimization": {\n    "stage": 3,\n    "offload_optimizer": {"device": "nvme", "nvme_path": "/local"},\n}}',
                },
                unless=("no deepspeed",),
            ),
            Fix(
                "Keep less in RAM: fewer DataLoader workers, data read in parts (numpy.memmap), "
                "weights loaded straight onto the GPU.",
                "one copy of the data for each worker",
                {
                    "torch": 'data = np.load(path, mmap_mode="r")\n'
                    "DataLoader(dataset, num_workers=2, prefetch_factor=2)",
                    "trainer": 'AutoModelForCausalLM.from_pretrained(\n    name, dtype=torch.bfloat16, device_map="cuda:0"\n)',
                },
            ),
            Fix(
                "Give the job more memory: a container's or Slurm's limit, WSL's .wslconfig, or swap.",
                code={"torch": "$ free -g\n$ docker run --memory=64g IMAGE"},
            ),
        ),
    ),
    "pinned-memory": (
        "pinned memory: the thread that pins batches finds no room",
        (
            Fix(
                "Set pin_memory=False for this DataLoader, and free the card if others use it.",
                "pinned copies of the prefetched batches, in RAM",
                {
                    "torch": "DataLoader(dataset, pin_memory=False)",
                    "trainer": "TrainingArguments(dataloader_pin_memory=False)",
                },
            ),
        ),
    ),
    "shm": (
        "shared memory (/dev/shm) ran out: DataLoader workers pass batches through it",
        (
            Fix(
                "Start the container with more shared memory, or use fewer workers.",
                "",
                {"torch": "$ docker run --shm-size=8g IMAGE\n$ docker run --ipc=host IMAGE"},
            ),
            Fix(
                "Without a new container: workers pass file names instead.",
                code={"torch": 'torch.multiprocessing.set_sharing_strategy("file_system")'},
            ),
        ),
    ),
    "page-file": (
        "Windows' commit limit: the paging file is too small",
        (
            Fix(
                "Enlarge the paging file: System, Advanced system settings, Performance, Advanced, "
                "Virtual memory, 'System managed size'; then restart.",
            ),
            Fix(
                "Use fewer DataLoader workers: each one loads torch's libraries again.",
                "several GB of commit for each worker",
                {"torch": "DataLoader(dataset, num_workers=0)"},
            ),
        ),
    ),
    "wsl": (
        "WSL2's own memory limit, or Windows' commit limit",
        (
            Fix(
                "In .wslconfig of your Windows folder, below [wsl2], raise memory= and swap= (half of "
                "the RAM and a quarter are usual), then restart WSL2.",
                code={"torch": "$ wsl.exe --shutdown"},
            ),
            Fix(
                "Enlarge Windows' paging file ('System managed size'), and update the GPU's driver."
            ),
        ),
    ),
    "nvml": (
        "memory ran out, and NVML could not say who holds it",
        (
            Fix(
                "See what uses the memory, and end it or use less: nvidia-smi; on a Jetson, where CPU "
                "and GPU share it, tegrastats.",
                code={"torch": "$ nvidia-smi\n$ free -g"},
            ),
            Fix(
                "If nvidia-smi fails too, restart: the driver was updated under a running system. On a "
                "MIG slice, check CUDA_VISIBLE_DEVICES.",
            ),
            _SMALLER_INPUT,
        ),
    ),
    "wddm-spill": (
        "more is allocated than the card has: Windows spills it into the computer's memory",
        (
            Fix(
                "Use less memory on the card: 4-bit weights, a smaller batch or picture. What is "
                "spilled runs many times slower.",
                code={
                    "torch": "torch.cuda.set_per_process_memory_fraction(1.0)  # fails at once instead",
                },
            ),
            Fix(
                "In NVIDIA's control panel, set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem "
                "Fallback' to see the true limit.",
            ),
        ),
    ),
    "driver": (
        "the driver refuses, although the card has memory free",
        (
            Fix(
                "Update the driver, ROCm or CUDA and torch, and restart; on Linux, raise the number of "
                "mappings.",
                code={"torch": "$ sudo sysctl -w vm.max_map_count=1048576"},
            ),
            Fix(
                "Look for a limit outside torch: ulimit -v, a MIG slice, a virtual GPU, the memory "
                "that the BIOS gives an integrated GPU.",
                code={"torch": "$ ulimit -v\n$ nvidia-smi -L"},
            ),
        ),
    ),
    "allocation-limit": (
        "one allocation is larger than the driver allows, though more is free",
        (
            Fix(
                "Split the tensor, or the batch that makes it; newer drivers allow more than 4 GiB.",
                code={"torch": "parts = [layer(part) for part in x.chunk(4)]"},
            ),
        ),
    ),
    "ranks-on-one-gpu": (
        "the ranks of one job are all on one GPU",
        (
            Fix(
                "Choose the GPU of each rank before anything uses CUDA. Don't end the other "
                "processes: they are this job.",
                "what the other ranks hold on this card",
                {
                    "torch": 'local_rank = int(os.environ["LOCAL_RANK"])\n'
                    "torch.cuda.set_device(local_rank)",
                    "trainer": 'AutoModelForCausalLM.from_pretrained(\n    name, device_map={"": '
                    'int(os.environ["LOCAL_RANK"])}\n)',
                },
            ),
        ),
    ),
    "colocated-engine": (
        "an inference engine (vLLM) shares the card with the training",
        (
            _SMALLER_GPU_SHARE,
            Fix(
                "Let the engine sleep during the training step, or give it GPUs of its own.",
                "its weights and KV cache",
                {
                    "torch": "llm.sleep(level=2)",
                    "trainer": 'GRPOConfig(use_vllm=True, vllm_mode="server")',
                },
            ),
        ),
    ),
    "vllm-room": (
        "vLLM has no room for its KV cache beside the weights",
        (
            Fix(
                "Shorten the context, or spread the weights over more GPUs. If nothing else uses the "
                "card, raise --gpu-memory-utilization.",
                "part of the KV cache, which shrinks with --max-model-len × --max-num-seqs",
                {
                    "torch": "LLM(model, max_model_len=8192, max_num_seqs=64)",
                    "vllm": "$ vllm serve MODEL --max-model-len 8192 --max-num-seqs 64",
                },
            ),
            Fix("Use quantized weights (AWQ, GPTQ, FP8) or a smaller model."),
        ),
    ),
    "cuda-graphs": (
        "CUDA graphs: their memory pools come on top of the KV cache",
        (
            Fix(
                "Run without CUDA graphs, or leave them room.",
                "1 to 3 GiB in vLLM",
                {
                    "torch": "LLM(model, enforce_eager=True)",
                    "vllm": "$ vllm serve MODEL --enforce-eager",
                },
            ),
        ),
    ),
    "fsdp-state-dict": (
        "the weights of all ranks are gathered on one GPU, to be saved or passed on",
        (
            Fix(
                "Gather the weights of one layer at a time (ms-swift: --move_model_batches 20).",
                "the weights of all other layers",
                {
                    "deepspeed": "for layer in model.children():\n    weights = list(layer.parameters())\n"
                    "    with deepspeed.zero.GatheredParameters(weights):\n        send(weights)",
                },
                unless=("no gather",),
            ),
            Fix(
                "Gather the weights on the CPU of rank 0.",
                "the weights of all other ranks",
                {
                    "torch": "from torch.distributed.checkpoint.state_dict import (\n"
                    "    StateDictOptions, get_model_state_dict,\n)\n\n"
                    "options = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
                    "state = get_model_state_dict(model, options=options)",
                    "accelerate": "FullyShardedDataParallelPlugin(\n"
                    "    state_dict_config=FullStateDictConfig(\n        offload_to_cpu=True, rank0_only=True\n    )\n)",
                    "deepspeed": '{"zero_optimization": {\n    "stage": 3,\n    "stage3_gather_16bit_weights_on_model_save": False,\n}}\n'
                    "# then: python zero_to_fp32.py CHECKPOINT OUTPUT",
                },
            ),
            Fix(
                "Save shards instead of the whole model: StateDictType.SHARDED_STATE_DICT, or "
                "torch.distributed.checkpoint.",
                code={
                    "torch": "import torch.distributed.checkpoint as dcp\n\n"
                    'dcp.save({"model": model.state_dict()}, checkpoint_id=path)',
                    "trainer": 'TrainingArguments(fsdp_config={"state_dict_type": '
                    '"SHARDED_STATE_DICT"})',
                },
            ),
        ),
    ),
    "checkpoint-on-gpu": (
        "a checkpoint is loaded onto the GPU, beside the model that it is for",
        (_CPU_LOAD,),
    ),
    "lora-merge": (
        "adapters are merged on the GPU: weights in 16 bits on top of the quantized ones",
        (
            Fix(
                "Merge on the CPU, from the base model in 16 bits.",
                "one model in 16 bits",
                {
                    "torch": "base = AutoModelForCausalLM.from_pretrained(\n"
                    '    name, dtype=torch.bfloat16, device_map="cpu"\n)\n'
                    "merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()",
                },
            ),
        ),
    ),
    "vae-decode": (
        "decoding the picture: the VAE works at full resolution",
        (
            Fix(
                "Decode in tiles or slices, and unload the other models first.",
                "activations of the whole picture but one tile's",
                {
                    "torch": "vae.enable_tiling()",
                    "diffusers": "pipe.vae.enable_tiling()\npipe.vae.enable_slicing()",
                },
            ),
            _SMALLER_INPUT,
        ),
    ),
    "outside-allocator": (
        "memory outside PyTorch's cache: a CUDA library finds no room",
        (
            Fix(
                "Leave room beside PyTorch's cache.",
                "",
                {
                    "torch": "torch.cuda.set_per_process_memory_fraction(0.9)",
                },
            ),
            Fix(
                "Shrink the library's buffers, or the batch.",
                code={
                    "torch": "$ export CUBLAS_WORKSPACE_CONFIG=:16:8\n"
                    "$ export NCCL_BUFFSIZE=1048576",
                },
            ),
        ),
    ),
    "mps-other": (
        "Metal's memory of this same process beside PyTorch's tensors",
        (
            Fix(
                "Give cached memory back, and keep shapes fixed: each new shape compiles a graph that "
                "stays. Newer torch and macOS keep less.",
                "what is reserved for heaps that no tensor uses",
                {"torch": "torch.mps.empty_cache()"},
            ),
            *_ON_MPS[1:],
        ),
    ),
    "tensorflow": (
        "TensorFlow's GPU memory ran out",
        (
            Fix(
                "Halve the batch, or use mixed precision.",
                "about half of the activations",
                {"tensorflow": 'tf.keras.mixed_precision.set_global_policy("mixed_float16")'},
            ),
            Fix(
                "If other programs use the card: let TensorFlow take memory as it needs it.",
                code={
                    "tensorflow": 'for gpu in tf.config.list_physical_devices("GPU"):\n'
                    "    tf.config.experimental.set_memory_growth(gpu, True)",
                },
            ),
        ),
    ),
    "jax": (
        "JAX's GPU memory ran out",
        (
            Fix(
                "Halve the batch, or recompute: jax.checkpoint.",
                "most activations of the functions that are recomputed",
                {"jax": "loss = jax.checkpoint(loss_function)"},
                unless=("card full before JAX",),
            ),
            Fix(
                "JAX takes 75% of the card at its start: end other programs on it, or let JAX take "
                "less, which also leaves room for CUDA's libraries.",
                "",
                {
                    "jax": "$ nvidia-smi\n$ export XLA_PYTHON_CLIENT_PREALLOCATE=false\n"
                    "$ export XLA_PYTHON_CLIENT_MEM_FRACTION=.5"
                },
            ),
        ),
    ),
    "paddle": (
        "PaddlePaddle's GPU memory ran out",
        (
            Fix("Halve the batch, or end other processes: nvidia-smi."),
            Fix(
                "Let Paddle take memory as it needs it.",
                code={"torch": "$ export FLAGS_allocator_strategy=auto_growth"},
            ),
        ),
    ),
    "llama-cpp": (
        "llama.cpp's buffers do not fit the GPU",
        (
            Fix(
                "Build llama.cpp to keep one copy of the compute buffer.",
                "the pipeline's other copies",
                {"torch": "$ cmake -B build -DGGML_CUDA=ON -DGGML_SCHED_MAX_COPIES=1"},
                unless=("one copy",),
            ),
            Fix(
                "Process fewer tokens at once (-ub) with flash attention (-fa on), and shorten the "
                "context (-c).",
                "part of the compute buffer, which grows with -ub and, without flash attention, -c",
                {"torch": "$ llama-server -m MODEL.gguf -ub 128 -c 8192 -fa on"},
                unless=("llama.cpp's weights", "llama.cpp's KV cache"),
            ),
            Fix(
                "Shorten the context (-c), and keep the KV cache in 8 bits (-ctk, -ctv).",
                "half of the KV cache, and what the shorter context leaves",
                {"torch": "$ llama-server -m MODEL.gguf -c 8192 -fa on -ctk q8_0 -ctv q8_0"},
                unless=("llama.cpp's weights",),
            ),
            Fix(
                "Keep fewer layers on the GPU (-ngl), or experts of the first layers on the CPU "
                "(--n-cpu-moe).",
                "the weights of these layers",
                {"torch": "$ llama-server -m MODEL.gguf -ngl 20 --n-cpu-moe 20"},
            ),
        ),
    ),
    "mlx": (
        "Metal's memory ran out in MLX",
        (
            Fix(
                "Train shorter sequences or fewer layers, and recompute activations.",
                "",
                {
                    "torch": "$ mlx_lm.lora --max-seq-length 1024 --batch-size 1 --grad-checkpoint",
                },
            ),
        ),
    ),
    "not-oom": (
        "no memory problem",
        (
            Fix(
                "Look at the error itself. For CUDA errors, find the true line: kernels run later than "
                "the line that started them.",
                code={"torch": "$ CUDA_LAUNCH_BLOCKING=1 python train.py"},
            ),
        ),
    ),
}
