"""A worker of the pool: pulls jobs, runs them on a local OpenAI-compatible server, posts tokens while they come.

slot.py      one job after the other, never two at a time
job.py       one job: generate, post, submit
batching.py  which tokens go into which post, without I/O
asking.py    what a job asks of the local server, and what the pool is told in the end, without I/O
local.py     the local server
pool.py      the pool's routes
times.py     how long it waits for what
reasons.py   why there was no answer, for people
"""
