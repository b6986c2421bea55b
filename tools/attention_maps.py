"""How much attention a small model pays to which part of its prompts.

Runs in the environment of vLLM: `python attention_maps.py PROMPTS.json OUT.json`. The prompts are a
list of objects: `name`; `messages` for the chat template, or `prompt`, a bare text; `parts`, texts
that stand in the prompt, by name; and `map`, whether attention between single tokens is wanted too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoTokenizer
from vllm_environment import MODEL

Weights = npt.NDArray[np.float64]

DOCUMENT = "[Doc_"
"""Names of parts that are documents begin so; attention is told for these."""

ANSWER = "answer"
"""The last token of a prompt, which says the answer's first one."""


def main() -> None:
    """Read prompts, write what the model attends to in them."""
    prompts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.set_num_threads(1)  # on a busy machine its threads wait for each other most of the time
    # only this implementation gives its weights away
    model = AutoModel.from_pretrained(
        MODEL, attn_implementation="eager", dtype=torch.float32
    ).eval()
    maps = [attention(prompt, tokenizer, model) for prompt in prompts]
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in maps)
    Path(sys.argv[2]).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def attention(prompt: dict[str, Any], tokenizer: Any, model: Any) -> dict[str, Any]:
    """Return a prompt's attention, averaged over heads, in thousandths.

    Returns:
        `tokens`: tokens of each document. `mass`: by part, for each layer, the attention that one
        of its tokens pays to each document, on average; all tokens of a prompt together get 1,000.
        With `map`: `pieces`, the prompt's tokens; `last_layer`, what each of them pays there to
        each one up to itself, a row a token; `head`, the number of the head whose annotation looks
        at documents most, from 0; and `last_layer_of_head`, that head's alone.
    """
    text = prompt.get("prompt")
    if text is None:
        text = tokenizer.apply_chat_template(
            prompt["messages"], tokenize=False, add_generation_prompt=True
        )
    encoded = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        # layer by layer: heads x queries x keys
        weights = [
            one[0] for one in model(**encoded, output_attentions=True, use_cache=False).attentions
        ]
        layers = [one.mean(dim=0).double().numpy() for one in weights]
    places = {name: _places(part, text, offsets) for name, part in prompt["parts"].items()}
    documents = [name for name in places if name.startswith(DOCUMENT)]
    readers = {name: where for name, where in places.items() if name not in documents}
    readers[ANSWER] = [len(offsets) - 1]
    result = {
        "name": prompt["name"],
        "tokens": {name: len(places[name]) for name in documents},
        "mass": {
            reader: [
                [_thousandths(_mass(layer, where, places[name])) for name in documents]
                for layer in layers
            ]
            for reader, where in readers.items()
        },
    }
    if prompt.get("map"):
        result["pieces"] = [text[begin:end] for begin, end in offsets]
        read = [place for name in documents for place in places[name]]
        heads = weights[-1].double().numpy()
        by_head = [_mass(head, readers["annotation"], read) for head in heads]
        result["head"] = head = int(np.argmax(by_head))
        result["last_layer"] = _rows(layers[-1])
        result["last_layer_of_head"] = _rows(heads[head])
    return result


def _places(part: str, text: str, offsets: list[list[int]]) -> list[int]:
    """Return the tokens that lie in a part's only place in the prompt, or overlap it."""
    if text.count(part) != 1:
        sys.exit(f"a part stands {text.count(part)} times in the prompt, not once: {part[:60]!r}")
    first = text.index(part)
    last = first + len(part)
    return [number for number, (begin, end) in enumerate(offsets) if begin < last and end > first]


def _mass(layer: Weights, readers: list[int], read: list[int]) -> float:
    return float(layer[np.ix_(readers, read)].sum(axis=1).mean())


def _rows(layer: Weights) -> list[list[float]]:
    return [
        [_thousandths(weight) for weight in row[: number + 1]] for number, row in enumerate(layer)
    ]


def _thousandths(weight: float) -> float:
    return round(1000 * weight, 1)


if __name__ == "__main__":
    main()
