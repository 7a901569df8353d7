# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "trl>=1.16",
#   "datasets>=4.7",
# ]
# ///
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    dataset = load_dataset(script_args.dataset_name, split=script_args.dataset_train_split)
    trainer = SFTTrainer(model=model_args.model_name_or_path, args=training_args, train_dataset=dataset)
    trainer.train()
    trainer.save_model(training_args.output_dir)
