"""A torch worker that exchanges nothing: what the computation allows.

python bench/racing/run_alone.py --job FOLDER --worker N
"""

from worker import Worker


def main() -> None:
    """Step through the job."""
    worker = Worker("steps alone")
    for step in range(worker.job.steps):
        worker.step(step)
    worker.finish()


if __name__ == "__main__":
    main()
