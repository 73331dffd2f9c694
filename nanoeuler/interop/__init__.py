# Made from book/19-other-peoples-models.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-others-safetensors
"""Models of others, in and out: safetensors_file and huggingface (a folder of the Hub), families
(the names of their tensors), gguf, gguf_model and quants (llama.cpp's file), llama2c; source
is the one way in and out.

May import: errors, files, model, tokenizer.
"""
