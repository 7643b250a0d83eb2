"""The demo: a tiny hybrid model answers word problems through SGLang, with and without speculation.

options.py    flags, checked before anything is set up (standard library only)
needs.py      can the interpreter given with --python do it? (any Python 3)
server.py     one SGLang server: start, wait, stop; stages.py: what it is doing meanwhile, from its log
interrupt.py  Ctrl-C: unwind once, leave nothing running
progress.py   what is being waited for (standard library only)
client.py     questions, answers and what the server says of each
compare.py    are two sets of outputs the same, or different only at ties?
memory.py     bytes of speculative state, from the server's log
machine.py    versions and devices for the record
report.py     the table and the JSON
run.py        one model: without speculation, with it, verdict
plugin_site.py  makes the plugin importable where nothing can be installed
"""
