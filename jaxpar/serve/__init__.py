"""Serves a trained model over HTTP: for trying it, and for small models. Needs the extra serve.

    POST /predict                                   a run of recipes/house_prices.py or recipes/digits.py
    POST /v1/completions, /v1/chat/completions      a language model, in the form of OpenAI's API, streamed if asked
    GET  /docs, /openapi.json, /v1/models           what can be asked
    GET  /healthz, /readyz, /metrics                for Kubernetes and Prometheus

One request is computed at a time and at most --max-waiting wait; others get 503. Requests are not batched, and there is one
process. For more load, export the run and serve the folder with an engine such as vLLM (docs/serving.md).

Read in this order: `open_run.py` (a folder as a model), `language_model.py` and `openai_api.py` (what a language model is asked
and answers), with `bodies.py` and `logprobs.py` (fields of both), `requests.py` (untrusted requests, computed one at a time),
`app.py` (HTTP), `pages.py` (/docs and /metrics), and `server.py` (the process).
"""
