"""Replacements for removed names and arguments that can't be derived from the tables of released code."""

ARGUMENTS: dict[str, str] = {
    "max_seq_length": "max_length",
    "warmup_ratio": "warmup_steps with a fraction below 1",
    "group_by_length": 'train_sampling_strategy="group_by_length"',
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": "hub_model_id, including the owner",
    "push_to_hub_token": "hub_token",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "tokenizer": "processing_class",
    "evaluation_strategy": "eval_strategy",
    "dataset_text_field": "dataset_text_field in the config",
    "packing": "packing in the config",
    "gpus": "devices",
}
# Arguments without a replacement, and the reason if it helps.
DROPPED: dict[str, str] = {
    "max_prompt_length": "prompts are no longer truncated, so filter out long prompts first",
    "dataset_batch_size": "",
    "overwrite_output_dir": "",
    "save_safetensors": "safetensors is the only format",
    "use_mps_device": "",
    "fp16_backend": "",
}
NAMES: dict[str, str] = {
    "trl.PPOTrainer": "GRPOTrainer or RLOOTrainer",
    "trl.PPOConfig": "GRPOConfig or RLOOConfig",
    "trl.PPOv2Trainer": "GRPOTrainer or RLOOTrainer",
    "trl.DataCollatorForCompletionOnlyLM": "completion_only_loss or assistant_only_loss",
    "trl.setup_chat_format": "clone_chat_template or chat_template_path",
    "trl.AutoModelForCausalLMWithValueHead": "GRPOTrainer, which does not need a value head",
    "transformers.AdamW": "torch.optim.AdamW",
    "transformers.AutoModelWithLMHead": "AutoModelForCausalLM",
    "transformers.AutoModelForVision2Seq": "AutoModelForImageTextToText",
    "datasets.load_metric": "evaluate.load",
    "transformers.TFTrainer": "Trainer",
    "transformers.deepspeed": "transformers.integrations.deepspeed",
}
# Arguments that `from_pretrained` passes on to the model's constructor, which rejects them. Maps each to the first
# release that does so and to its replacement.
LOADING: dict[str, tuple[str, str]] = {
    "load_in_4bit": ("5.0", "quantization_config=BitsAndBytesConfig(load_in_4bit=True)"),
    "load_in_8bit": ("5.0", "quantization_config=BitsAndBytesConfig(load_in_8bit=True)"),
    "use_auth_token": ("5.0", "token"),
    "use_flash_attention_2": ("4.53", 'attn_implementation="flash_attention_2"'),
}
