"""Digits with Horovod's Keras API, in words that Keras 3 takes.

    horovodrun -np 2 python after.py
"""

import hvdtrain.keras as hvd
import keras
import tensorflow as tf
from keras.layers import Conv2D, Dense, Flatten, MaxPooling2D
from keras.models import Sequential
from tensorflow.keras.preprocessing.image import ImageDataGenerator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

hvd.init()

# One GPU for each process.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

x, y = load_digits(return_X_y=True)
x, y = x.reshape(-1, 8, 8, 1).astype("float32") / 16, keras.utils.to_categorical(y, 10)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=0)

model = Sequential()
model.add(Conv2D(32, 3, activation="relu", input_shape=(8, 8, 1)))
model.add(MaxPooling2D())
model.add(Flatten())
model.add(Dense(64, activation="relu"))
model.add(Dense(10, activation="softmax"))

rate = 0.003 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate=rate))
model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("digits.h5"))

# Each process trains on images of its own, moved sideways by up to a tenth.
x_train, y_train = x_train[hvd.rank()::hvd.size()], y_train[hvd.rank()::hvd.size()]
images = ImageDataGenerator(width_shift_range=0.1)
model.fit(images.flow(x_train, y_train, batch_size=32), epochs=12, callbacks=callbacks, verbose=0)

loss, accuracy = model.evaluate(ImageDataGenerator().flow(x_test, y_test, shuffle=False), verbose=0)
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.3f}")
