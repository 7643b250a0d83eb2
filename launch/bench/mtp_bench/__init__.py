"""The serving benchmark: one server after the other, at equal flags and equal memory, driven by SGLang's bench_serving.

options.py        flags, checked before anything is set up (standard library only)
modes.py          the ways to serve that are compared, and when one does not apply
loads.py          the kinds of load: requests at once, requests a second, conversations
drafts.py         chain4, tree8, ...: what a server drafts
shapes.py         a model folder from launch/shapes: configuration and a tokenizer, no weights
plan.py           which servers, and which loads each of them gets
server.py         one server, by SGLang's own test helpers
serve.py          what those helpers start in place of `sglang serve`
client.py         one load: SGLang's bench_serving, in this process
conversations.py  one load of conversations, with a client of its own
generate.py       one streamed answer, as token ids
logs.py           what a server's log says: memory, running requests, retractions
record.py         the JSON: written after every load, taken up again by the next call
progress.py       stage, time so far, time to go
run.py            the loop
cli.py            from flags to exit status
report.py         the tables at the end
plot.py           the plots, from the JSON
"""
