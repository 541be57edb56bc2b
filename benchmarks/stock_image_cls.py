"""The peer of recipes/image_cls.py: the Trainer as transformers' run_image_classification.py calls it.

python benchmarks/stock_image_cls.py --model FOLDER --train_file PICTURES --result out.json --out FOLDER

That script's transforms are torchvision's, of which there is no CPU build. On Pillow's pictures, those below do the
same: random resized crop, mirror, to tensor, normalize (torchvision 0.28, transforms/transforms.py).
"""

import argparse
import random

import numpy
import torch
from clock import Clock
from datasets import load_dataset
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments


def transformed(picture, side, mean, deviation):
    area, ratio = picture.width * picture.height * random.uniform(0.08, 1), random.uniform(3 / 4, 4 / 3)
    width = min(picture.width, round((area * ratio) ** 0.5))
    height = min(picture.height, round((area / ratio) ** 0.5))
    left, top = random.randint(0, picture.width - width), random.randint(0, picture.height - height)
    picture = picture.crop((left, top, left + width, top + height)).resize((side, side), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    values = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
    return values.sub_(mean).div_(deviation)


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "train_file", "result", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("batch", 16), ("max_steps", 20), ("seed", 42)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    processor = AutoImageProcessor.from_pretrained(options.model)
    model = AutoModelForImageClassification.from_pretrained(options.model)
    side = processor.size.get("shortest_edge") or processor.size["height"]
    mean, deviation = (torch.tensor(of).view(3, 1, 1) for of in (processor.image_mean, processor.image_std))
    pictures = load_dataset("imagefolder", data_dir=options.train_file, split="train")

    def transform(rows):
        rows["pixel_values"] = [transformed(of.convert("RGB"), side, mean, deviation) for of in rows["image"]]
        return rows

    def collate(rows):
        pixels = torch.stack([row["pixel_values"] for row in rows])
        return {"pixel_values": pixels, "labels": torch.tensor([row["label"] for row in rows])}

    clock = Clock()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.out,
            per_device_train_batch_size=options.batch,
            max_steps=options.max_steps,
            learning_rate=options.learning_rate,
            seed=options.seed,
            bf16=options.bf16,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=pictures.with_transform(transform),
        data_collator=collate,
        processing_class=processor,
        callbacks=[clock],
    )
    trainer.train()
    trainer.save_model()
    clock.write(options.result)


if __name__ == "__main__":
    main()
