"""The forecast of memory on a GPU, of any framework's job: closed form over phases, per rank.

resolve.py settles what a job leaves open, states.py counts what rests, phases.py what comes and goes, overhead.py what
the allocator and the driver add, core.py puts them together.
"""
