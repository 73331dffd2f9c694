# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-group
"""Many processes that train one model: group (what they ask of each other), threads and mpi (who
carries it), scatter (of a batch), stepper, controller (who says what is done), launch, watchdog.

May import: errors, measurements, model, engines, engines.cpu.
"""
