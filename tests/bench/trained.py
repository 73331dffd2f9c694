"""What a run leaves for the book: `python tests/bench/trained.py RUN NAME [--said FILE.json]`.

Of RUN/config.json and RUN/metrics.jsonl it makes data/trained/NAME.json, some kilobytes: settings,
the training loss as means over hundredths of the run, bits per byte of held-out text, samples, the
speed; and what was asked of the model afterwards with what it said, of FILE.json, a list of pairs.
--device, --commit, --versions (JSON): where another machine trained.
"""

import argparse
import datetime
import json
from pathlib import Path
from statistics import fmean, median

from nanoeuler import measurements
from nanoeuler.files import project_root, replacing

PARTS = 100  # points of a curve: more than a figure of this width can show


def thinned(lines: list[dict]) -> list[list[float]]:
    """[step, mean loss] of the hundredths of a run, each by its last step."""
    edges = [round(i * len(lines) / PARTS) for i in range(PARTS + 1)]
    pieces = [lines[a:b] for a, b in zip(edges, edges[1:], strict=False) if b > a]
    return [[piece[-1]["step"], round(fmean(x["loss"] for x in piece), 4)] for piece in pieces]


def told(run: Path) -> dict:
    """What the files of a run directory tell of it."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    texts = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(text) for text in texts]
    norms = [line["gradient_norm"] for line in lines]
    seconds = [line["seconds"] for line in lines]
    return {
        "model": config["model"], "training": config["training"],
        "losses": thinned(lines),
        "held_out": [[x["step"], round(x["bits_per_byte"], 4)] for x in lines
                     if "bits_per_byte" in x],
        "samples": [[x["step"], x["sample"]] for x in lines if "sample" in x],
        "tokens": sum(line["tokens"] for line in lines),
        "seconds": round(sum(seconds), 1), "seconds_a_step": round(median(seconds), 5),
        "norm": [round(median(norms), 3), round(max(norms), 1)],
        "clipped": sum(norm > config["training"]["clip"] for norm in norms),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--said", type=Path)
    parser.add_argument("--device", default=measurements.device())
    parser.add_argument("--commit", default=measurements.commit())
    parser.add_argument("--versions", type=json.loads, default={})
    options = parser.parse_args()
    found = told(options.run)
    found["said"] = json.loads(options.said.read_text("utf-8")) if options.said else []
    found |= {"device": options.device, "commit": options.commit, "versions": options.versions,
              "date": datetime.date.today().isoformat()}  # fmt: skip
    to = project_root() / "data" / "trained" / f"{options.name}.json"
    to.parent.mkdir(exist_ok=True)
    with replacing(to) as temporary:
        text = json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True)
        temporary.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
