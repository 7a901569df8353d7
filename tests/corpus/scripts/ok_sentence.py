# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "sentence-transformers>=4",
#   "datasets>=4.7",
# ]
# ///
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses

model = SentenceTransformer("HuggingFaceTB/SmolLM2-135M")
rows = Dataset.from_dict({"anchor": ["a cat", "a dog"], "positive": ["a kitten", "a puppy"]})
trainer = SentenceTransformerTrainer(model=model, train_dataset=rows, loss=losses.MultipleNegativesRankingLoss(model))
trainer.train()
model.save_pretrained("out/embedder")
