"""How long does an utterance take that Whisper writes down, beside transformers?

    scripts/bench whisper [--weights float32] [--repeats 9] [--new 40] [--sounds 10] [--beams 1]

The model has the shape of Whisper tiny and random weights, the same in both libraries, float32 in
transformers and in `--weights` here. Each pair is a call of this library and one of transformers on
the same sounds, which take turns: features of the samples, the encoder, the whole call. As random
weights never end a text, both write down `--new` tokens. The figure is the median over pairs of
transformers' seconds divided by ours.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from parts.clock import alternated, seconds
from parts.report import options, write
from torch import Tensor

import everystep as es
from everystep.executors.choice import encoder_of
from everystep.types import Prompt

RATE = 16_000
TINY: Mapping[str, Any] = {
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "begin_suppress_tokens": None,
    "pad_token_id": 50257,
    "bos_token_id": 50257,
    "eos_token_id": 50257,
    "decoder_start_token_id": 50258,
}
Side = Callable[[], object]


def models(weights: str) -> tuple[Any, es.LanguageModel]:
    """The same random weights in both libraries, ours rounded as asked."""
    config = transformers.WhisperConfig(**TINY)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = transformers.WhisperForConditionalGeneration(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, es.load_model(folder, quantize=None if weights == "float32" else weights)


def samples(duration: float) -> np.ndarray:
    """(n,) tones in noise."""
    time = np.arange(int(duration * RATE)) / RATE
    noise = np.random.default_rng(0).standard_normal(len(time))
    tones = np.sin(2 * np.pi * 220 * time) * (0.5 + 0.5 * np.sin(9 * time))
    return (0.3 * tones + 0.05 * noise).astype(np.float32)


def sides(args: Any) -> dict[str, tuple[Side, Side]]:
    """What is timed: ours and that of transformers."""
    theirs, own = models(args.weights)
    extractor, other = es.WhisperFeatureExtractor(), transformers.WhisperFeatureExtractor()
    heard = samples(args.sounds)
    features: Tensor = extractor(heard)["input_features"]  # type: ignore[assignment]
    asked = {"min_new_tokens": args.new, "max_new_tokens": args.new, "num_beams": args.beams}
    prompt = Prompt(whole={"input_features": features[0]})

    def read() -> object:
        with torch.no_grad():
            return theirs.get_encoder()(features)

    return {
        "features": (lambda: extractor(heard), lambda: other(heard, sampling_rate=RATE)),
        "encoder": (lambda: own.core.encode(prompt, by=encoder_of(own.core)), read),
        "utterance": (
            lambda: own.generate(features, **asked),
            lambda: theirs.generate(features, **asked),
        ),
    }


def main() -> None:
    """Times each part and writes a dated file."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--weights", default="float32", choices=("float32", "int8", "int4"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--sounds", type=float, default=10.0, help="seconds")
    parser.add_argument("--beams", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name, (own, theirs) in sides(args).items():
        own(), theirs()
        pairs = alternated(args.repeats, lambda own=own: seconds(own), lambda t=theirs: seconds(t))
        ratios = sorted(other / one for one, other in pairs)
        quarter = len(ratios) // 4
        rows.append(
            {
                "part": name,
                "seconds": statistics.median(one for one, _ in pairs),
                "seconds_of_transformers": statistics.median(other for _, other in pairs),
                "ratio": statistics.median(ratios),
                "quarters": [ratios[quarter], ratios[-1 - quarter]],
            }
        )
        print(f"{name}: {rows[-1]['ratio']:.2f} times as fast", flush=True)
    write("whisper", args, {"rows": rows}, packages=("transformers",))


if __name__ == "__main__":
    main()
