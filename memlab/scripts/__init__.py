"""Run a user's training script unmodified, and measure or predict one of its steps.

launch.py        how the script is started: a file or a module, with or without torchrun
processes.py     lets it believe that it is rank 0 of several
started.py       runs the processes that it starts, here or in forks
isolation.py     keeps its files in a temporary folder, and refuses connections and processes
extensions.py    refuses to compile C++ and CUDA extensions
saved_files.py   lets checkpoints be saved and loaded in that folder
data.py          stands in for missing data, with vision_data.py for
                 torchvision's, hub.py, columns.py and word_tokenizer.py for the Hugging Face
                 Hub, tiktoken_encodings.py for tiktoken's, and pretrained.py for weights of
                 torch.hub, torchvision and timm
steps.py         finds the script's training steps, and stops it after the last wanted one
evaluations.py   finds its evaluations
changes.py       changes that save memory, applied to the script from outside, with their code;
                 techniques.py makes them, late_logits.py the chunked loss
running.py       all of it together: run the script, return the trace
"""
