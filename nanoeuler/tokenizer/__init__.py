# Made from book/02-tokens.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-hand
"""Text to ids and back: reference (chapter 2), pretokenizer, encode, learn, tokenizer, file (the
format it is saved in), tiktoken (GPT-2's ranks), chat_template. Other people's tokenizers: others
(readers and writers), scanners, vocabulary, segments, huggingface, sentencepiece, ggml, jinja (chat
templates).

May import: jit, errors, files, measurements.
"""
