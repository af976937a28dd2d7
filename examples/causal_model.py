"""Causal language model of transformers, for text that ``data.task: language`` prepared.

model: {name: "examples.causal_model:CausalModel", arguments: {model_type: gemma, hidden_size: 128, …}}
"""

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.models.token_rows import places_in_documents


class CausalModel(nn.Module):
    def __init__(self, signature: Signature, model_type: str, **sizes: object) -> None:
        super().__init__()
        self.document_start, length = signature.document_start, signature.inputs[0].shape[0]
        given = {"vocab_size": signature.buckets, "max_position_embeddings": length, "use_cache": False, **sizes}
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **given))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, position_ids=places_in_documents(ids, self.document_start)).logits
