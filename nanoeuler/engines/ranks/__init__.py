# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-group
"""Many processes that train one model: group (what they ask of each other), threads and mpi (who
carries it), stepper, lead (who says what is done), launch (who starts them), watch (who ends them).

May import: errors, measurements, model, engines, engines.cpu.
"""
