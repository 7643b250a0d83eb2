"""Train one of the tiny models and export it: python launch/train/train.py --model gdn --out DIR --minutes 5"""

import argparse
import time
from pathlib import Path

import torch
from tinymodels import corpus, evaluate, export, loop, report
from tinymodels import tokenizer as tok
from tinymodels.registry import MODELS, padded_vocab

TOKENIZER = Path(__file__).parent / "tokenizer"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="checkpoint folder to write; resume state goes beside it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, help="stop after this much training; the schedule follows")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=768)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--problems", type=int, default=500_000, help="distinct training problems")
    parser.add_argument("--workers", type=int, default=1, help="processes that make the problems")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eval-problems", type=int, default=400)
    parser.add_argument("--generate-problems", type=int, default=200, help="free-running check; 0 skips it")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    started = time.perf_counter()
    tokenizer = tok.load(TOKENIZER)
    text = corpus.build(TOKENIZER, args.seed, args.problems, args.workers)
    print(f"{len(text.tokens) / 1e6:.1f} M tokens in {time.perf_counter() - started:.1f} s", flush=True)

    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    model = MODELS[args.model](padded_vocab(tokenizer.get_vocab_size())).to(device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = loop.Settings(
        steps=args.steps,
        minutes=args.minutes,
        rows=args.rows,
        length=args.length,
        learning_rate=args.lr,
        seed=args.seed,
    )
    checkpoint = args.out.with_name(args.out.name + ".checkpoint.pt")
    state = loop.train(model, text.to(device), settings, device, checkpoint, resume=args.resume)

    model.eval()
    export.round_to_bfloat16(model)
    export.save(model, tokenizer, TOKENIZER, args.out)  # before the evaluation: the weights are safe
    scores = evaluate.score(model, tokenizer, args.eval_problems, device)
    print(f"{model.name}: {scores}", flush=True)
    generated = None
    if args.generate_problems:
        generated = evaluate.generate_accuracy(model, tokenizer, args.generate_problems, device)
        print(f"{model.name}: greedy accuracy {generated:.3f} of {args.generate_problems}", flush=True)
    run = {
        "model": args.model,
        "seed": args.seed,
        "steps_done": state.step,
        "seconds": round(state.seconds, 1),
        "tokens": state.step * args.rows * args.length,
        "rows": args.rows,
        "length": args.length,
        "learning_rate": args.lr,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    results = {
        **scores.to_json(),
        "shots": evaluate.SHOTS,
        "problems": args.eval_problems,
        "generate_accuracy": generated,
        "generated_problems": args.generate_problems,
    }
    report.write(model, args.out, {"run": run, "scores": results, "history": state.history})
    print(f"{args.out}: done in {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
