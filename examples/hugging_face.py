"""A Hugging Face model, and adapters of one by PEFT (LoRA), trained with a guarantee for every person.

Random weights, so that nothing is downloaded: in earnest, ``BertModel.from_pretrained("a folder")``. Needs transformers
and, for :func:`lora`, peft: ``python examples/hugging_face.py`` trains both.
"""

import numpy as np
import torch
import transformers

import fedveil as fv

WORDS, LENGTH = 100, 12


class Classifier(torch.nn.Module):
    """What fedveil trains takes records and returns (records, outputs): codes in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        settings = transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
        self.encoder = transformers.BertModel(settings, add_pooling_layer=False)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits of the classes; made-up numbers, with which models are tried, become codes."""
        codes = features.long().clamp(0, WORDS - 1)
        seen = torch.ones_like(codes)
        return self.head(self.encoder(codes, attention_mask=seen).last_hidden_state.mean(1))


def lora() -> torch.nn.Module:
    """Return the same with its weights frozen, and adapters of rank 4 in every attention: these are trained alone."""
    import peft

    whole = Classifier().requires_grad_(False)
    settings = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["query", "value"])
    whole.encoder = peft.get_peft_model(whole.encoder, settings)
    whole.head.requires_grad_(True)
    return whole


def people() -> fv.Population:
    """Return made-up texts as codes, of 60 people in three hospitals."""
    random = np.random.default_rng(0)
    codes, user = random.integers(0, WORDS, (180, LENGTH)), np.arange(180) % 60
    label = (codes < WORDS // 2).sum(1) > LENGTH // 2
    return fv.population(
        codes,
        label.astype(int),
        user=user,
        silo=user % 3,
        n_users=60,
        task="classification",
        classes=[0, 1],
        silos=[0, 1, 2],
    )


def train(model: torch.nn.Module, rounds: int = 3, folder: str = "runs") -> fv.Result:
    """Train a model for a few rounds."""
    method = fv.uldp_avg(clip=0.5, noise_multiplier=2.0, local_learning_rate=0.1)
    return fv.train(model, people(), method=method, rounds=rounds, delta=1e-3, folder=folder)


if __name__ == "__main__":
    for made in (Classifier, lora):
        torch.manual_seed(0)
        result = train(made())
        trained = sum(one.numel() for one in result.model.parameters() if one.requires_grad)
        print(f"{made.__name__}: {trained} parameters, epsilon {result.statement.epsilon:.2f}")
