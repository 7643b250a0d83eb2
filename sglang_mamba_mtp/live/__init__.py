"""``python -m sglang_mamba_mtp.live``: a page of a running server, in a browser. Imports neither SGLang nor torch.

`asking` gets a server's answers, `reading` makes records of them, `history` keeps them and makes rates, `watching` does
so at intervals; `charts`, `words` and `page` draw, `serve` answers browsers.
"""
