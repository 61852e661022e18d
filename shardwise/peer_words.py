"""Keys of other frameworks, and what Shardwise calls them.

Someone who writes `tp=2` in a layout or `gradient_accumulation_steps` in a job knows what they want; the error for the
unknown key names our key. The words come from PyTorch, Megatron-LM, DeepSpeed, torchtitan, transformers and nanoGPT.
Each table maps an answer to the words it answers: `{n}` stands for the degree the user wrote, and an answer that ends
with a full stop is a sentence of its own.
"""

LAYOUT_WORDS = {
    "replicate={n} (DDP) or shard={n} (ZeRO)": "dp data_parallel data_parallel_size data_parallel_degree num_gpus",
    "replicate={n}": "replicate ddp dp_replicate data_parallel_replicate_degree replicas",
    "shard={n}": "shard dp_shard data_parallel_shard_degree",
    "shard={n} zero=3": "fsdp fsdp2 fully_shard zero3 full_shard fsdp_size",
    "shard={n} zero=2": "zero2 shard_grad_op",
    "shard={n} zero=1": "zero1 use_distributed_optimizer distributed_optimizer",
    "replicate=N shard={n} zero=3": "hsdp hybrid_shard",
    "tensor={n}": "tensor tp tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size mp "
    "model_parallel tp_size",
    "tensor={n} (which also splits activations along the sequence) or context={n}": "sp sequence_parallel "
    "sequence_parallel_size",
    "pipeline={n}": "pipeline pp pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size pp_size num_stages",
    "schedule=1f1b, interleaved, zero-bubble or another schedule": "pipeline_parallel_schedule pipeline_schedule "
    "pp_schedule",
    "virtual={n}": "virtual vpp virtual_pipeline virtual_pipeline_model_parallel_size num_virtual_stages",
    "stages=3,5 (layers per pipeline stage)": "pipeline_split_points module_fqns_per_model_part split_points",
    "context={n}": "context cp context_parallel context_parallel_size context_parallel_degree cp_size",
    "context={n} context_method=ulysses": "ulysses ulysses_degree ulysses_size",
    "context={n} context_method=ring": "ring ring_attention ring_degree",
    "expert={n}": "expert ep expert_parallel expert_parallel_size expert_parallel_degree "
    "expert_model_parallel_size ep_size",
    "micro_batch={n}": "micro_batch mbs micro_batch_size microbatch_size micro_batch_size_per_gpu "
    "train_micro_batch_size_per_gpu per_device_train_batch_size local_batch_size device_batch_size",
    "zero={n}": "zero zero_stage stage zero_optimization",
    "recompute=full or recompute=selective": "recompute ac activation_checkpointing activation_checkpoint "
    "gradient_checkpointing checkpoint_activations recompute_activations recompute_granularity",
}

JOB_WORDS = {
    "batch.samples (the global batch, in samples) or batch.tokens": "bs batch_size global_batch_size train_batch_size "
    "gbs total_batch_size",
    "Set batch.samples (the global batch) and micro_batch in layout; gradient accumulation follows from them.": "gas "
    "gradient_accumulation_steps gradient_accumulation grad_accum_steps accumulate_grad_batches num_microbatches",
    "steps": "max_steps train_iters max_iters num_steps iterations total_steps train_steps",
    "Training is counted in steps or tokens, not in epochs; set steps or tokens.": "epochs num_epochs num_train_epochs "
    "max_epochs",
    "tokens": "train_tokens total_tokens max_tokens",
    "optimizer.name": "optim optimizer_name",
    "optimizer.lr": "lr learning_rate max_lr",
    "optimizer.min_lr_ratio (the last learning rate over the highest)": "min_lr min_lr_factor",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type lr_decay_style lr_schedule",
    "optimizer.schedule (the learning rate) or schedule=1f1b in layout (the pipeline)": "schedule scheduler",
    "optimizer.warmup": "warmup warmup_steps warmup_iters warmup_ratio lr_warmup_steps lr_warmup_iters "
    "lr_warmup_fraction num_warmup_steps",
    "optimizer.clip": "clip max_grad_norm clip_grad grad_clip gradient_clipping max_norm",
    "optimizer.weight_decay": "weight_decay wd",
    "optimizer.betas": "betas beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "eps epsilon adam_epsilon adam_eps",
    "model.layers": "num_hidden_layers num_layers n_layer n_layers num_layer",
    "model.width": "hidden_size n_embd d_model dim embed_dim hidden_dim",
    "model.heads": "num_attention_heads n_head n_heads num_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_query_groups n_kv_head num_kv_heads",
    "model.head_dim": "kv_channels head_size",
    "model.ffn": "intermediate_size ffn_hidden_size n_inner d_ff ffn_dim mlp_dim",
    "model.vocab": "vocab_size padded_vocab_size",
    "model.sequence": "max_position_embeddings seq_length seq_len sequence_length block_size n_positions n_ctx "
    "context_length max_seq_len max_seq_length",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon",
    "model.tied": "tie_word_embeddings tie_embeddings weight_tying tied_embeddings enable_weight_tying",
    "model.activation": "hidden_act activation_function",
    "model.positions": "position_embedding_type",
    "model.norm": "normalization norm_type",
    "model.dropout": "resid_pdrop embd_pdrop hidden_dropout hidden_dropout_prob",
    "model.init_std": "initializer_range init_method_std",
    "model.experts": "num_experts n_routed_experts num_local_experts moe_num_experts",
    "model.experts_per_token": "num_experts_per_tok moe_router_topk top_k moe_top_k",
    "model.expert_ffn": "moe_intermediate_size moe_ffn_hidden_size",
    "model.name": "model_type architecture flavor model_name_or_path model_name",
    'precision = "bf16"': "bf16 bfloat16 use_bf16",
    'precision = "fp16"': "fp16 float16 half amp",
    'precision = "fp8"': "fp8 float8",
    "precision": "dtype torch_dtype mixed_precision mixed_precision_param params_dtype",
    "compile": "torch_compile use_compile",
    "sdpa_backend": "attn_implementation attention_backend use_flash_attn flash_attention",
    "layout": "parallelism parallel parallel_dims strategy deepspeed fsdp_config",
    "data.source or data.path": "dataset dataset_name dataset_path data_path train_data_path",
    "data.tokenizer": "tokenizer tokenizer_path tokenizer_type tokenizer_name hf_assets_path",
    "data.workers": "num_workers dataloader_num_workers",
    "data.prefetch": "prefetch_factor dataloader_prefetch_factor",
    "run.folder": "output_dir out_dir save dump_folder save_folder save_dir default_root_dir",
    "run.device": "device use_cpu no_cuda accelerator",
    "run.processes": "nproc nproc_per_node world_size devices num_processes",
    "run.max_restarts": "max_restarts",
    "checkpoint.every": "save_steps save_interval checkpoint_interval save_every",
    "checkpoint.keep": "save_total_limit keep_latest_k keep_last",
    "checkpoint.asynchronous": "async_save async_mode",
    "validation.every": "eval_steps eval_interval eval_every evaluation_strategy eval_strategy val_check_interval",
    "validation.samples": "eval_iters eval_samples limit_val_batches",
    "tracker": "report_to wandb tensorboard enable_wandb enable_tensorboard loggers",
    "Every step goes to metrics.jsonl in the run folder; tracker sends it to W&B, TensorBoard or a CSV file too.": (
        "logging log_interval logging_steps log_freq logging_dir"
    ),
    "Use the command line: shardwise train --resume RUN_FOLDER.": "resume resume_from_checkpoint resume_from load "
    "auto_resume init_from",
    "gradient.compress": "gradient_compression grad_compression",
    "local_sgd": "diloco local_steps",
    "seed": "random_seed manual_seed",
    "There is no such section; use steps, precision, [batch], [optimizer] and [data].": "training trainer train "
    "training_args",
}

_BY_LAYOUT_WORD = {word: answer for answer, words in LAYOUT_WORDS.items() for word in words.split()}
_BY_JOB_WORD = {word: answer for answer, words in JOB_WORDS.items() for word in words.split()}


def layout_hint(key: str, value: str = "") -> str | None:
    """Returns our form of another framework's layout key ("did you mean tensor=2?"), or None for an unknown word."""
    word = _normalize(key)
    if word in _BY_LAYOUT_WORD:
        return f"did you mean {_layout_form(word, value)}?"
    return job_hint(key) if word in _BY_JOB_WORD else None


def job_hint(key: str, value: object = "") -> str | None:
    """Returns our form of another framework's job key ("did you mean model.width?"), or None for an unknown word."""
    word = _normalize(key)
    if word in _BY_JOB_WORD:
        answer = _BY_JOB_WORD[word]
        return answer[0].lower() + answer[1:] if answer.endswith(".") else f"did you mean {answer}?"
    if word in _BY_LAYOUT_WORD:
        return f"it belongs to the layout; did you mean {_layout_form(word, value)} in layout?"
    return None


def _normalize(key: str) -> str:
    return key.strip().lstrip("-").lower().replace("-", "_")


def _layout_form(word: str, value: object) -> str:
    is_degree = not isinstance(value, bool) and str(value).isdigit()
    return _BY_LAYOUT_WORD[word].replace("{n}", str(value) if is_degree else "N")
