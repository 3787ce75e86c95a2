"""Digits with Horovod's TensorFlow API: a tape and a loop, on Keras 3.

    horovodrun -np 2 python after.py
"""

import sys

import horovod
import hvdtrain.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main():
    hvd.init()
    gpus = tf.config.experimental.list_physical_devices("GPU")
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x.astype("float32") / 16, y, test_size=0.2, random_state=0)
    mine = slice(hvd.rank(), None, hvd.size())
    dataset = tf.data.Dataset.from_tensor_slices((x_train[mine], y_train[mine])).repeat().shuffle(2000).batch(32)

    model = tf.keras.Sequential([tf.keras.layers.Dense(128, activation="relu"), tf.keras.layers.Dense(10)])
    loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.optimizers.Adam(0.003 * hvd.size())

    @tf.function
    def train(images, labels, first):
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if first:  # the optimizer has its variables only now
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)

    for step, (images, labels) in enumerate(dataset.take(600 // hvd.size())):
        train(images, labels, step == 0)

    if hvd.rank() == 0:
        accuracy = (model(x_test).numpy().argmax(1) == y_test).mean()
        print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        horovod.run(main, np=int(sys.argv[1]))
    else:
        main()
