from types import ModuleType

from lab.benchmarks import command


def run_command(module: ModuleType) -> int:
    """Run a module of the lab with the options in sys.argv. Return the exit status."""
    return command.main(module.__doc__, module.add_arguments, module.run)
