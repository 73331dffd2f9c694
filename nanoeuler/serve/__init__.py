# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-seats
"""A server: texts for many clients at once, by OpenAI's protocol, and a chat page.

request, queue, batching (several texts in a pass), streaming, responses, attention maps, and web.

May import: engines, errors, inference, model, paths, tokenizer.
"""
