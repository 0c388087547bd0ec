"""Where Overspill meets Hugging Face: model directories in, model directories out.

`hf` finds and builds models and tokenizers, `weights` fills them, `export` writes them, `generate` tries them,
`safetensors_file` is the format. Training knows none of this: it gets a module and its parameters.
"""
