"""What the classes of a data set are called."""

CLASS_NAMES = {  # of the data sets whose classes a number does not say
    "fashion_mnist": (
        *("T-shirt", "Trousers", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}


def class_names(dataset: str, num_classes: int) -> tuple[str, ...]:
    """Return what each class shows, as `fetch.dataset` names the data set: its name, or else its number."""
    return CLASS_NAMES.get(dataset, tuple(map(str, range(num_classes))))
