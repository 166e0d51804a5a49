"""TFRecord files by TensorFlow's own writer: pictures with captions, what MaxDiffusion prepares, and a compressed file.

TensorFlow needs packages of its own (requirements-tensorflow.txt). Writes tests/golden/tfrecord/:
pictures/train.tfrecord-00000-of-00001: a PNG file with one caption and a JPEG file with two, and features with numbers;
prepared/file_00-1000.tfrec: latents and text embeddings, by the names that MaxDiffusion's input pipeline reads;
packed/train.tfrecord: the pictures, compressed with gzip.
"""

import numpy as np
import tensorflow as tf

from common import GOLDEN, normal, report, rng

FOLDER = GOLDEN / "tfrecord"


def of_bytes(*values):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def of_integer(value):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def of_floats(*values):
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def write(name, examples, options=None):
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for feature in examples:
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString(deterministic=True))
    report(path)


def picture(encode, captions):
    """8x12 pixels: red is 20 times the column, green 30 times the row."""
    y, x = np.mgrid[:8, :12]
    pixels = np.stack([x * 20, y * 30, np.full_like(x, 7)], -1).astype(np.uint8)
    return {
        "image/encoded": of_bytes(encode(pixels).numpy()),
        "image/height": of_integer(8),
        "image/mean": of_floats(*pixels.mean((0, 1))),
        "caption": of_bytes(*(caption.encode() for caption in captions)),
    }


def tensor(name, shape):
    return of_bytes(tf.io.serialize_tensor(tf.constant(normal(rng("tfrecord", name), shape))).numpy())


def main():
    pictures = [
        picture(tf.io.encode_png, ["a first picture, größer"]),
        picture(lambda pixels: tf.io.encode_jpeg(pixels, quality=100), ["a second", "the same again"]),
    ]
    write("pictures/train.tfrecord-00000-of-00001", pictures)
    write("packed/train.tfrecord", pictures, tf.io.TFRecordOptions(compression_type="GZIP"))
    prepared = {"moments": tensor("moments", (2, 2, 8)), "clip_embeddings": tensor("clip_embeddings", (3, 4))}
    write("prepared/file_00-1000.tfrec", [prepared])


if __name__ == "__main__":
    main()
