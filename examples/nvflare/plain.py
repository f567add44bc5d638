"""A job of NVFlare, after its hello-pt. The programs beside it add privacy, by at most five changed lines each."""

from net import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

SITES, ROUNDS = 2, 3


def main() -> None:
    recipe = FedAvgRecipe(
        name="hello-pt",
        min_clients=SITES,
        num_rounds=ROUNDS,
        model=Net(),
        train_script="client.py",
    )
    run = recipe.execute(SimEnv(num_clients=SITES))
    print("result:", run.get_result())


if __name__ == "__main__":
    main()
