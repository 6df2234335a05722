"""lm-eval over the wire, on the dialogues that this project holds out of its training.

Writes what it found to found.json in the folder that it runs in, for a comparison of every bit.
"""

import json
import os
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(Path.cwd())}

import lm_eval
from seen import run, seen

MODEL = "smollm2-135m-instruct"
DIALOGUES = Path(__file__).parents[3] / "src/everystep/train/held_out_dialogues.jsonl"
FOUND = {}


def rows() -> list[dict]:
    """Return the questions, each with its answer and another one's."""
    lines = [json.loads(line)["messages"] for line in DIALOGUES.read_text().splitlines()]
    pairs = [(one[-2]["content"], one[-1]["content"]) for one in lines]
    others = [answer for _, answer in pairs[1:] + pairs[:1]]
    return [
        {"question": question, "choices": [answer, other], "answer": answer}
        for (question, answer), other in zip(pairs, others, strict=True)
    ]


def task(name: str, output_type: str, **options) -> dict:
    data = Path.cwd() / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows())))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": output_type,
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
        **options,
    }


def evaluate(kind: str, url: str, own: dict, arguments: str = "", **options) -> dict:
    """Return the samples of a task, and note its results."""
    known = f"model={MODEL},base_url={url},num_concurrent=2,max_retries=1{arguments}"
    found = lm_eval.simple_evaluate(
        model=kind, model_args=known, tasks=[own], batch_size=4, log_samples=True,
        bootstrap_iters=0, verbosity="ERROR", **options,
    )  # fmt: skip
    samples = found["samples"][own["task"]]
    assert len(samples) == len(rows())
    return {"results": found["results"][own["task"]], "samples": samples}


@seen("`local-completions`: log-likelihoods of two choices, with the server's own tokenizer")
def choices(address: str) -> None:
    own = task(
        "choices", "multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
        doc_to_target="{{0}}", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    found = evaluate("local-completions", f"{address}/v1/completions", own)
    FOUND["choices"] = [
        [*arguments, *answers[0]]
        for one in found["samples"]
        for arguments, answers in zip(one["arguments"], one["resps"], strict=True)
    ]
    assert 0 <= found["results"]["acc,none"] <= 1


@seen("`local-completions`: the likelihood of whole texts")
def rolling(address: str) -> None:
    own = task(
        "texts", "loglikelihood_rolling", doc_to_text="", doc_to_target="{{answer}}",
        metric_list=[{"metric": "word_perplexity"}],
    )  # fmt: skip
    found = evaluate("local-completions", f"{address}/v1/completions", own)
    FOUND["texts"] = [[one["arguments"][0][0], one["resps"][0][0]] for one in found["samples"]]


def generation(name: str) -> dict:
    return task(
        name, "generate_until", doc_to_text="{{question}}", doc_to_target="{{answer}}",
        generation_kwargs={"until": ["\n\n", ".", "!", "?", ";"], "max_gen_toks": 16},
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip


@seen("`local-completions`: generation with five stop strings")
def generates(address: str) -> None:
    found = evaluate("local-completions", f"{address}/v1/completions", generation("generate"))
    FOUND["generate"] = [[one["arguments"][0][0], one["resps"][0][0]] for one in found["samples"]]


@seen("`local-chat-completions`: generation")
def chats(address: str) -> None:
    url = f"{address}/v1/chat/completions"
    found = evaluate(
        "local-chat-completions", url, generation("chat"), apply_chat_template=True
    )  # fmt: skip
    texts = [one["resps"][0][0] for one in found["samples"]]
    assert any(texts)
    Path("found.json").write_text(json.dumps(FOUND))


run()
