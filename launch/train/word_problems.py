"""Write word problems as JSONL: python launch/train/word_problems.py --split test --count 64 --seed 1 --out x.jsonl"""

import argparse
import itertools
import json
from pathlib import Path

from tinymodels.problems import SPLITS, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lines = [json.dumps(p.to_json()) for p in itertools.islice(problems(args.seed, args.split), args.count)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} {args.split} problems -> {args.out}")


if __name__ == "__main__":
    main()
